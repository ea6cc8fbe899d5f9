"""File formats: rows as columns of plain Python values, whatever they mean."""
