"""GEMMs whose order of additions does not depend on the number of rows."""
