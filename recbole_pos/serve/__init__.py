"""Use of a trained model: recommendations, exports, HTTP."""
