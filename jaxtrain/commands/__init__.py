"""What each command of the command line does; `jaxtrain.cli` parses and imports the one that runs."""
