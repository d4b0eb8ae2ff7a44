"""The papers' models, each a thin composition of a backbone, position schemes and a loss."""
