"""Files of texts in, files of answers out: streamed, resumable, with bad rows set aside."""
