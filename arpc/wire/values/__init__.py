"""Objects to bytes and back: pickles, tensors by schema, and the policy that reads what peers send."""
