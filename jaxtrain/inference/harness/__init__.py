"""A model as lm-eval-harness asks it: log-likelihoods of texts, and texts up to a stop."""
