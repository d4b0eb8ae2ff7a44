"""Look inside a trained model: ``recbole-pos inspect``."""
