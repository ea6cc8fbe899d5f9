"""The planner: memory, time and cost of a step on hardware that need not be here."""
