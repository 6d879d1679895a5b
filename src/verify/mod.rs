//! Signature verification: a layer that passes only requests with a valid signature. Handshakes: a
//! layer that answers them.
//!
//! 1. A signature covers the body as it arrived. [`VerifyLayer`] buffers the body once, verifies
//!    these bytes and forwards them. It copies nothing if the body is one buffer.
//! 2. A verified request carries [`Verified`](crate::Verified), which
//!    [`require_verified`](crate::DedupLayer::require_verified) requires.
//! 3. Every other request is answered 401 without a body. The reason is logged, and not sent.
//! 4. A signature is compared as a whole and in constant time. A comparison that stops early would
//!    let an attacker find the signature byte by byte.
//! 5. A signed time must be within the [`tolerance`](Verifier::tolerance) of the server's time,
//!    before or after. So an attacker cannot send a captured delivery again for ever.
//! 6. A [`Scheme`] is data, a preset's or your own. [`VerifyLayer::select`] looks up the verifier
//!    of each request.
//! 7. Verification does not recognise a retry, which has the same id, a new time and a new
//!    signature. Deduplication does.
//! 8. [`EchoLayer`] answers the handshakes whose senders want an echo. A preset makes it.
//!
//! [The guide](crate::guide::verification) has the order of the layers, and a table of what each
//! sender signs.

mod adyen;
mod data;
mod echo;
mod error;
mod key;
mod layer;
mod public_url;
mod received;
#[cfg(feature = "testing")]
mod sign;
mod twilio;
mod verifier;

pub use crate::provider::scheme::{Part, Scheme};
pub use echo::{Echo, EchoLayer};
pub use error::{Refusal, VerifierError};
pub use layer::{Verify, VerifyLayer};
pub use verifier::Verifier;
