//! Signatures: the schemes on published vectors, and requests through both layers.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "what cannot be unwrapped fails the test"
)]

mod echo;
mod errors;
mod layers;
mod own;
mod page;
mod report_only;
mod schemes;
mod select;
mod vectors;
