//! The packed value of one key: its layout, and what its bytes say.
