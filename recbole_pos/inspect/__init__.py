"""Look inside a trained model: ``recbole-pos plot`` and ``recbole-pos inspect``."""
