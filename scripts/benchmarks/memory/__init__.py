"""What a rank holds and sends under axrt, and under what a user would take instead; see
scripts/bench_memory.

    settings   the rows: a runtime with its options
    model      the model, the optimizer and the microbatches that all of them train
    contestant the form of a runtime that is ready to train; of_axrt, of_torch, of_deepspeed
    job        one row of one round: a job of fresh processes that train with one setting
    storages   the bytes of weights, gradients and optimizer state, at the peak of a step
    traffic    the bytes that a rank sends
    process    the growth of a process
    report     the rows as tables
"""
