"""The Ray Serve application around tokenalign."""
