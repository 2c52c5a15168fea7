"""Checks whether a machine is fit for training: `facts` looks, `findings` judges, `links` measures
between ranks."""
