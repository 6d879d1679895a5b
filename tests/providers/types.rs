//! The types of events, on the samples of every preset.

use std::collections::BTreeSet;

use tower_dedup::key::{Extracted, RequestRef};
use tower_dedup::provider;

use crate::cases;
use crate::page::fact;

/// The types that the samples of each preset have. The other presets have none.
const TYPES: &[(&str, &[&str])] = &[
    ("cloudevents", &["com.example.someevent", "com.example.someotherevent", "t"]),
    ("github", &["issues", "ping", "push"]),
    ("gitlab", &["Push Hook"]),
    ("gitea", &["push"]),
    ("circleci", &["job-completed", "workflow-completed"]),
    ("stripe", &["charge.succeeded", "invoice.paid", "v1.billing.meter.error_report_triggered"]),
    (
        "shopify",
        &[
            "inventory_levels/update",
            "orders/create",
            "orders/paid",
            "products/create",
            "shop/redact",
        ],
    ),
    ("square", &["payment.updated"]),
    ("paddle", &["transaction.completed", "transaction.paid"]),
    ("adyen", &["AUTHORISATION", "CAPTURE", "REFUND"]),
    ("slack", &["app_mention", "message"]),
    ("discord", &["APPLICATION_AUTHORIZED"]),
    (
        "whatsapp",
        &["calls", "message_template_status_update", "messages", "smb_message_echoes", "usage"],
    ),
    ("twitch", &["channel.follow", "drop.entitlement.grant"]),
    ("sendgrid", &["click", "delivered", "dropped", "group_unsubscribe", "open", "processed"]),
    (
        "postmark",
        &["Bounce", "Click", "Delivery", "New", "Open", "SpamComplaint", "SubscriptionChange"],
    ),
    ("azure-event-grid", &["a", "e", "t"]),
    ("hubspot", &["contact.propertyChange"]),
    ("box", &["FILE.UPLOADED"]),
    ("microsoft-graph", &["created", "deleted", "updated"]),
    ("messenger", &["comments"]),
    ("line", &["follow", "message"]),
    ("zoom", &["app_deauthorized", "meeting.ended", "meeting.started"]),
    ("quickbooks", &["qbo.customer.created.v1", "qbo.invoice.updated.v1"]),
    ("xero", &["CONTACT", "INVOICE"]),
    ("razorpay", &["payment.authorized", "payment.captured"]),
    ("mollie", &["payment-link.expired", "payment-link.paid"]),
    ("gocardless", &["mandates|cancelled", "payments|confirmed", "payments|paid_out"]),
    ("notion", &["page.content_updated", "page.locked"]),
    ("intercom", &["conversation.user.created", "conversation.user.replied"]),
    ("workos", &["dsync.user.created", "dsync.user.updated"]),
];

#[test]
fn types_of_samples_are_pinned() {
    let mut all = Vec::new();
    for preset in provider::ALL {
        let mut found = BTreeSet::new();
        for case in cases::of(*preset) {
            let (head, body) = case.parts();
            let extracted = preset.extractor().extract(&RequestRef::new(&head, &body));
            let Ok(Extracted::Keys(keys)) = extracted else { continue };
            let types = keys.events().iter().filter_map(|event| event.event_type());
            found.extend(types.map(str::to_owned));
        }
        assert_eq!(!found.is_empty(), fact(*preset, "Type").is_some(), "{}", preset.name());
        if !found.is_empty() {
            all.push((preset.name(), Vec::from_iter(found)));
        }
    }
    assert_eq!(all.len(), TYPES.len());
    for ((name, found), (pinned_name, pinned)) in all.iter().zip(TYPES) {
        assert_eq!(name, pinned_name);
        assert_eq!(found, pinned, "{name}");
    }
}
