"""Run a federation: plan, assemble, train, keep the models, predict and serve."""
