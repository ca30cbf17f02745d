"""Objects to bytes and back: pickles, tensors by schema, and the policies for reading what peers send."""
