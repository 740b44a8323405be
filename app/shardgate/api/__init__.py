"""The control plane: routes below `/api`, health and metrics, with their documents."""
