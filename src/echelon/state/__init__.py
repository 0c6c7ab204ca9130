"""What a rank holds of the model and its optimizer, by the names of the plain model."""
