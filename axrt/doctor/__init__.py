"""Is this machine fit for training: `facts` looks, `findings` judges, `links` measures between
ranks."""
