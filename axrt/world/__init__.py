"""The job: how its ranks come up, stay alive, and go down."""
