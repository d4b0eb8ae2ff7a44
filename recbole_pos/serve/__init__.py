"""What a trained model is asked for."""
