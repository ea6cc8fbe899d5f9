"""The commands of the command line; `jaxtrain.cli` parses the arguments and imports the one that runs."""
