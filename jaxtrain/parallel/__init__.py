"""How one step is computed by many devices: gradients, pipeline schedules, stages."""
