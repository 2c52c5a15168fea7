"""Plans: orders of tasks made from costs, and what else is chosen before a run."""
