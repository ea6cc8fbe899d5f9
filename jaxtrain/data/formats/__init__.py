"""File formats: rows by number, as columns of plain Python values, whatever they mean."""
