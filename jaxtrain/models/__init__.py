"""The shipped models, and the contract that they share with the models of users."""
