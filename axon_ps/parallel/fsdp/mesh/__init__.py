"""Models whose replicas are several workers, on the axes of a mesh other than dp. See `union`."""
