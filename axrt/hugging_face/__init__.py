"""Models as Hugging Face's `transformers` stores them: a directory with config.json and safetensors
files."""
