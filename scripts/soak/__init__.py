"""A long trial: workers call, stream, train and pass RRefs while they are killed, stopped, cut off and restarted."""
