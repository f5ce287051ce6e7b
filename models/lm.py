"""The language model: embedding, then norm, mixer, norm and MLP for each layer, then norm and head."""
