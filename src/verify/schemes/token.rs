//! Shared tokens: the sender sends the secret itself, and signs nothing.

use ctutils::CtEq;

use crate::verify::error::Refusal;
use crate::verify::received::Received;

/// Compares the header with the secret in constant time.
pub(in crate::verify) fn verify(
    secret: &[u8],
    request: &Received<'_>,
    header: &'static str,
) -> Result<(), Refusal> {
    let is_equal = request.header(header)?.as_bytes().ct_eq(secret).to_bool();
    is_equal.then_some(()).ok_or(Refusal::Forged)
}
