"""What a trained model is requested."""
