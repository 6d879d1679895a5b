//! Forges and builds.

use super::preset::{DAY, DEFAULTS, Floor, Handshake, Preset, Retries, Rule};
use super::read::header_is;
use crate::key::{self, RequestRef};

/// GitHub: the header `X-GitHub-Delivery`, one value per event.
///
/// GitHub never retries by itself; a person can send a delivery again for three days, and it keeps
/// its id: to let such a redelivery run, [`forget`](crate::adapter::MaintenanceAdapter::forget) the key. All
/// webhooks that subscribe to an event share the value: where a repository's and an organisation's
/// webhook post to one URL and both must be handled, give each its own route and namespace. The
/// signature covers the body, not this header. An answer that is not a 2xx loses the event: write a
/// job down and answer at once, as the example `ack_fast` does.
///
/// A `ping` is a handshake if the signed body is one too; a ping that is sent as a form has its id
/// and is a delivery like any other.
pub const GITHUB: Preset = Preset {
    name: "github",
    title: "GitHub",
    key: "header `X-GitHub-Delivery`",
    rule: Rule::Part(|| key::header("x-github-delivery")),
    handshake: Some(Handshake {
        words: "`X-GitHub-Event: ping` with `/zen` and `/hook_id` in the body",
        is: is_ping,
    }),
    floor: Floor(3 * DAY, "a person can send it again for 3 days"),
    retries: Retries::Never,
    how: "a person can, under the same id",
    source: "https://docs.github.com/en/webhooks/using-webhooks/best-practices-for-using-webhooks",
    unverified: "the 3 days (third parties, quoting the documentation)",
    ..DEFAULTS
};

/// The header alone is not signed: it must not let an event past.
fn is_ping(request: &RequestRef<'_>) -> bool {
    let has = |pointer| key::json(pointer).read(request).is_ok_and(|value| value.is_some());
    header_is(request, "x-github-event", "ping") && has("/zen") && has("/hook_id")
}

/// GitLab: the header `Idempotency-Key` (since 17.4), else `webhook-id`.
///
/// Both stay the same when a person resends the event. `X-Gitlab-Event-UUID` is shared by the
/// different events of recursive webhooks, and what `X-Gitlab-Webhook-UUID` names is contradictory:
/// neither is a key. The older secret token signs nothing. The newer signature covers `webhook-id`
/// and not `Idempotency-Key`: whoever can read one signed delivery can send it again under another.
pub const GITLAB: Preset = Preset {
    name: "gitlab",
    title: "GitLab",
    key: "header `Idempotency-Key`, else `webhook-id`",
    rule: Rule::Part(|| key::header("idempotency-key").or(key::header("webhook-id"))),
    floor: Floor(7 * DAY, "a margin of ours: no schedule is documented"),
    how: "the id is documented to be the same on retries, a schedule is not; a person can, under \
          the same id",
    source: "https://docs.gitlab.com/user/project/integrations/webhooks/",
    unverified: "when it retries; `webhook-id` (third parties, quoting the documentation)",
    ..DEFAULTS
};

/// Gitea and Forgejo: the header `X-Gitea-Delivery`.
///
/// They do not retry, and when a person sends a delivery again it has a *new* id and runs again. An
/// answer that is not a 2xx loses the event: write a job down and answer at once, as the example
/// `ack_fast` does.
pub const GITEA: Preset = Preset {
    name: "gitea",
    title: "Gitea",
    aliases: &["forgejo"],
    key: "header `X-Gitea-Delivery`",
    rule: Rule::Part(|| key::header("x-gitea-delivery")),
    floor: Floor(DAY, "a margin of ours: it never retries"),
    retries: Retries::Never,
    how: "a person can, under a new id, which runs again",
    source: "https://github.com/go-gitea/gitea/blob/main/models/webhook/hooktask.go",
    unverified: "that Forgejo sends this header (third parties); what the signature covers",
    ..DEFAULTS
};

/// CircleCI: `/id` in the body, which its documentation gives for this purpose.
pub const CIRCLECI: Preset = Preset {
    name: "circleci",
    title: "CircleCI",
    key: "`/id`",
    rule: Rule::Part(|| key::json("/id")),
    floor: Floor(7 * DAY, "a margin of ours: no schedule is documented"),
    retries: Retries::Undocumented,
    how: "whether and when",
    source: "https://circleci.com/docs/webhooks-reference/",
    unverified: "the schedule; what the signature covers; whether a test ping has an id",
    ..DEFAULTS
};
