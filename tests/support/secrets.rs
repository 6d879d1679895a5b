//! Secrets for tests of a scheme.

use tower_dedup::verify::Scheme;

/// Secrets for the verifier and for signing. The first is text, hexadecimal and base64.
const SECRETS: [[&str; 2]; 3] = [
    ["6120736563726574206f662032342062797465732e2e2e2e"; 2],
    // The first pair of keys of RFC 8032, section 7.1.
    [
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
    ],
    // A pair of keys on P-256, made for tests.
    [
        "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEu5xywnLmdP135pgu4+Dc2H5LxIKJ9mfI/yUcDPuw7yzWLtSakZA8TdMXds5+v2yDLy+3LTNtYVC4Nyf6Qdh+JQ==",
        "e2acd3efd495d6cdef46bc897e6ed2d6ac305f0b76d7b5fb7cf8acf8f0efb89b",
    ],
];

/// Returns a secret for the verifier of this scheme, and one for signing.
pub fn test_secrets(scheme: Option<Scheme>) -> [&'static str; 2] {
    let takes = |[secret, _]: &[&str; 2]| {
        scheme.is_some_and(|scheme| scheme.verifier_at("https://h", secret).is_ok())
    };
    SECRETS.into_iter().find(takes).expect("the scheme takes one of them")
}
