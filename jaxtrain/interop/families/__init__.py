"""One table per published family (docs/adding_a_family.md shows how to add one), and the table of all of them."""
