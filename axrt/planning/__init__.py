"""From the settings of a schedule to the job that ranks run."""
