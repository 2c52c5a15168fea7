"""Workers run the tasks that the brain picks, one worker for each family of kinds."""
