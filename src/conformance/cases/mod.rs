//! The cases. Each takes a fresh store and panics where the store breaks a rule.

pub mod answers;
pub mod completion;
pub mod corrupt;
pub mod fence;
pub mod held;
pub mod inspection;
pub mod lease;
pub mod maintenance;
pub mod on_claim;
pub mod races;
pub mod stored;
