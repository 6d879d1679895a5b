//! Code hosting and build services.

use super::preset::{DAY, DEFAULTS, MIB, Preset, Retries};
use super::read::header_is;
use super::scheme::Part::Body;
use super::scheme::Scheme;
use crate::key::{self, RequestRef, Rule};

/// GitHub: the header `X-GitHub-Delivery`, one value per event.
///
/// GitHub never retries by itself. For three days, a person can send a delivery again, under the
/// same id. To let this redelivery run, [forget its
/// key](crate::guide::incidents#running-an-event-again). All webhooks that subscribe to an event
/// share the value. So a repository and its organisation may post an event to one URL under one id.
/// If both deliveries must be handled, give each its own route and namespace. A response other than
/// 2xx loses the event: put an [inbox](crate::guide::inbox) around the layer. GitHub does not
/// deliver an event that is larger than 25 MB.
///
/// The first request to a new hook is a `ping`. The layer answers it, if the signed body is a ping,
/// too. A ping that is sent as a form has its own id and is deduplicated.
///
/// Set the hook's content type to `application/json`. A handler that takes axum's `Json` answers a
/// form 415, and GitHub does not send the event again.
///
/// [Signature](https://docs.github.com/en/webhooks/using-webhooks/validating-webhook-deliveries):
/// HMAC-SHA256 over the body. Neither the id nor a time is signed.
pub const GITHUB: Preset = Preset {
    name: "github",
    rule: || Rule::part(key::header("x-github-delivery")),
    event_type: Some(|| key::header("x-github-event")),
    handshake: Some(is_ping),
    floor: 3 * DAY, // redelivery by a person
    max_body: Some(25 * MIB),
    retries: Retries::Never,
    scheme: Some(Scheme::hmac_sha256("x-hub-signature-256", &[Body]).prefix("sha256=")),
    sample_headers: &[("x-github-event", "push"), ("x-github-delivery", "{id}")],
    signed_id: Some(false),
    ..DEFAULTS
};

/// The header is not signed, so the body has to be a ping too.
fn is_ping(request: &RequestRef<'_>) -> bool {
    let has = |pointer| key::json(pointer).read(request).is_ok_and(|value| value.is_some());
    header_is(request, "x-github-event", "ping") && has("/zen") && has("/hook_id")
}

/// GitLab: the header `Idempotency-Key` (since 17.4), else `webhook-id`.
///
/// Both stay the same on a retry, and if a person sends the event again. An event of more than 25
/// MB is not delivered. Do not use two other headers: the different events of recursive webhooks
/// share `X-Gitlab-Event-UUID`, and the documentation of `X-Gitlab-Webhook-UUID` contradicts
/// itself.
///
/// [Verification](https://docs.gitlab.com/user/project/integrations/webhooks/) is by the shared
/// *secret token*. Nothing is signed, so whoever reads a delivery can forge others. The newer
/// signing token, which covers `webhook-id` but not `Idempotency-Key`, is not supported.
pub const GITLAB: Preset = Preset {
    name: "gitlab",
    rule: || Rule::part(key::header("idempotency-key").or(key::header("webhook-id"))),
    event_type: Some(|| key::header("x-gitlab-event")),
    floor: 7 * DAY, // our estimate: no schedule is documented
    max_body: Some(25 * MIB),
    scheme: Some(Scheme::token("x-gitlab-token")),
    sample_headers: &[("x-gitlab-event", "Push Hook"), ("idempotency-key", "{id}")],
    signed_id: Some(false),
    ..DEFAULTS
};

/// Gitea and Forgejo: the header `X-Gitea-Delivery`.
///
/// They never retry. If a person sends a delivery again, it has a *new* id and runs again. A
/// response other than 2xx loses the event: put an [inbox](crate::guide::inbox) around the layer.
///
/// [Signature](https://docs.gitea.com/usage/webhooks): HMAC-SHA256 over the body. Neither the id
/// nor a time is signed.
pub const GITEA: Preset = Preset {
    name: "gitea",
    aliases: &["forgejo"],
    rule: || Rule::part(key::header("x-gitea-delivery")),
    event_type: Some(|| key::header("x-gitea-event")),
    floor: DAY, // our estimate: it never retries
    retries: Retries::Never,
    scheme: Some(Scheme::hmac_sha256("x-gitea-signature", &[Body])),
    sample_headers: &[("x-gitea-event", "push"), ("x-gitea-delivery", "{id}")],
    signed_id: Some(false),
    ..DEFAULTS
};

/// CircleCI: `/id` in the body, which its documentation recommends for this purpose.
///
/// [Signature](https://circleci.com/docs/outbound-webhooks): HMAC-SHA256 over the body, which has
/// the id. No time is signed.
pub const CIRCLECI: Preset = Preset {
    name: "circleci",
    rule: || Rule::part(key::json("/id")),
    event_type: Some(|| key::json("/type")),
    floor: 7 * DAY, // our estimate: no schedule is documented
    retries: Retries::Undocumented,
    scheme: Some(
        Scheme::hmac_sha256("circleci-signature", &[Body])
            .separated_by(&[',', ' ', '\t'])
            .prefix("v1="),
    ),
    signed_id: Some(true),
    sample: r#"{"id":"{id}","type":"workflow-completed"}"#,
    ..DEFAULTS
};
