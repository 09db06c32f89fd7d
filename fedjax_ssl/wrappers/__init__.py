"""Other methods of any method, without a change of its code: faulty clients, robust averages, compression, privacy."""
