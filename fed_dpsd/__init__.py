"""FedDPSD: federated data-free distillation with differential privacy, as a Flower app."""

__version__ = "0.1.0"
