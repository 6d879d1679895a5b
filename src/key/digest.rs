//! SHA-256 digests: ids of bodies and of long ids, and derived names.

use sha2::{Digest, Sha256};

/// The prefix of an id that is a body digest, so that it never equals a sender's own id.
const BODY_PREFIX: &str = "body_";

/// Returns the id of a body: `body_` and the 64 lower-case hex digits of its SHA-256.
pub(crate) fn body_id(body: &[u8]) -> String {
    format!("{BODY_PREFIX}{}", sha256_hex(body))
}

/// Returns the SHA-256 in an id that [`body_id`] made; `None` for another id.
pub(super) fn sha256_of_body_id(id: &str) -> Option<[u8; 32]> {
    let hex = id.strip_prefix(BODY_PREFIX)?.as_bytes();
    let mut sha256 = [0; 32];
    for (byte, digits) in sha256.iter_mut().zip(hex.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    (hex.len() == 64).then_some(sha256)
}

/// Returns the SHA-256 of `bytes`.
pub(crate) fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// Returns the SHA-256 of `bytes` in 64 lower-case hex digits.
pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    hex(&sha256(bytes))
}

/// Returns `bytes` in lower-case hex digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut hex = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        hex.push(char::from(DIGITS[usize::from(byte >> 4)]));
        hex.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    hex
}

/// Returns the first 16 bytes, in hex, of the SHA-256 over `parts`. Each part is preceded by its
/// length in eight big-endian bytes, so that two different lists never give the same input.
pub(crate) fn derive<'p>(parts: impl IntoIterator<Item = &'p str>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part.as_bytes());
    }
    hex(&hash.finalize()[..16])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sha256_of_a_body_id_is_that_of_the_body() {
        assert_eq!(sha256_of_body_id(&body_id(b"abc")), Some(sha256(b"abc")));
        let short = body_id(b"abc").split_off(1);
        for id in [&short, "body_", &body_id(b"abc")[..67], &format!("body_{}", "g".repeat(64))] {
            assert_eq!(sha256_of_body_id(id), None, "{id}");
        }
    }

    #[test]
    fn derive_tells_lists_with_other_boundaries_apart() {
        assert_ne!(derive(["ab", "c"]), derive(["a", "bc"]));
        assert_eq!(derive(["ab", "c"]).len(), 32);
    }
}
