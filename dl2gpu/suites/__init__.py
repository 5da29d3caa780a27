"""Writers of labelled corpora: fleets of jobs with a stated mixture of faults."""
