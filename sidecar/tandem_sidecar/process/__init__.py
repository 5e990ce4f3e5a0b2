"""The process around the data path: start, drain, reload, workers, and the admin port."""
