"""What a plan shows: tables, JSON and pages."""
