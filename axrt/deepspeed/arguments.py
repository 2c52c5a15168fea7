"""The options of DeepSpeed's command line."""

from argparse import ArgumentParser


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config`. Returns the parser."""
    group = parser.add_argument_group("DeepSpeed, as read by axrt.deepspeed")
    group.add_argument("--deepspeed", action="store_true", help="changes nothing")
    group.add_argument("--deepspeed_config", help="JSON file with settings")
    return parser
