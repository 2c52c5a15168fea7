"""What runs the tasks that the brain picks: a worker a family of kinds."""
