//! Deliveries whose signature is wrong.

use std::time::SystemTime;

use bytes::Bytes;
use http::Request;
use tokio::time::sleep;

use crate::delivery::{DAY, Signer, with_member};
use crate::judge::{Judge, LATE, Shown, Stop, fail, unknown};
use crate::trial::Trial;

pub(super) const TRIALS: &[Trial] = &[
    Trial {
        name: "signature-forged",
        sent: "an event signed with another secret, and one that is changed after it was signed; then the genuine ones",
        right: "the forged ones are refused without an effect, and use no id up: the genuine ones run",
        look_up: VERIFICATION,
        run: |judge| Box::pin(forged(judge)),
    },
    Trial {
        name: "signature-missing",
        sent: "an event without a signature; then the genuine one",
        right: "the first is refused without an effect, and uses no id up: the genuine one runs",
        look_up: VERIFICATION,
        run: |judge| Box::pin(missing(judge)),
    },
    Trial {
        name: "signature-stale",
        sent: "an event that was signed a day ago; then the genuine one",
        right: "the first is refused without an effect, and uses no id up: the genuine one runs",
        look_up: &["webhook timestamp tolerance", "replay attack"],
        run: |judge| Box::pin(stale(judge)),
    },
    Trial {
        name: "signature-doubled",
        sent: "an event with two forged signatures, one with a forged and a valid signature; then the genuine ones",
        right: "two forged signatures are refused; each event has one effect after all",
        look_up: &["duplicate HTTP headers", "webhook signature verification"],
        run: |judge| Box::pin(doubled(judge)),
    },
];

const VERIFICATION: &[&str] =
    &["webhook signature verification", "verify the signature before the idempotency key"];

/// Sends an event that is to be refused, and then the genuine one with its id.
async fn refused(judge: &Judge, what: &str, id: &str, request: &Request<Bytes>) -> Shown {
    let answer = judge.send_patiently(request).await;
    let told = format!("{what} is answered {answer}");
    if answer.is_success() {
        return fail(told);
    }
    if judge.counter.is_some() {
        sleep(LATE).await;
    }
    if judge.effects(id).await? > Some(0) {
        return fail(format!("{what} takes effect"));
    }
    match judge.handled(id, judge.settles()).await {
        Err(Stop::Fail(why)) => fail(format!("{told}; of the genuine one after it, {why}")),
        Ok(_) if answer.status().is_some() && answer.is_momentary() => {
            unknown(format!("{told}, which does not say that its signature is refused"))
        }
        shown => shown.map(|_| told),
    }
}

async fn forged(judge: &Judge) -> Shown {
    let signer = judge.signer()?;
    let [id, other_id] = [judge.id(), judge.id()];
    let forged = signer.forger().sign(judge.template.with(&id))?;
    let mut told = refused(judge, "an event signed with another secret", &id, &forged).await?;
    let signed = judge.event(&other_id)?;
    let body = with_member(signed.body(), "forged", "yes");
    let changed = signed.clone().map(|_| body);
    // A shared token covers no body, and Adyen's signature not all of it.
    if signer.sign(changed.clone())?.headers() != signed.headers() {
        let what = "an event changed after it was signed";
        told = format!("{told}; {}", refused(judge, what, &other_id, &changed).await?);
    }
    judge.with_effects(told)
}

async fn missing(judge: &Judge) -> Shown {
    let signer = judge.signer()?;
    let id = judge.id();
    let mut request = judge.template.with(&id);
    for name in &signer.headers {
        request.headers_mut().remove(name); // a FILE may have it
    }
    judge.with_effects(refused(judge, "an event without a signature", &id, &request).await?)
}

async fn stale(judge: &Judge) -> Shown {
    let signer = judge.signer()?;
    if !signer.signs_time {
        return unknown("not run: this sender signs no time");
    }
    let id = judge.id();
    let request = signer.sign_at(judge.template.with(&id), SystemTime::now() - DAY)?;
    judge.with_effects(refused(judge, "an event signed a day ago", &id, &request).await?)
}

/// Sends events with two signatures. A receiver may refuse one of which one is valid, because it may also read the other.
async fn doubled(judge: &Judge) -> Shown {
    let signer = judge.signer()?;
    if signer.headers.is_empty() {
        return unknown("not run: the signature of this sender is in the body");
    }
    let forger = signer.forger();
    let pair = |id: &str, [first, second]: [&Signer; 2]| -> Result<_, Stop> {
        let (event, now) = (judge.template.with(id), SystemTime::now());
        let mut request = first.sign_at(event.clone(), now)?;
        let other = second.sign_at(event, now)?;
        for name in &signer.headers {
            other
                .headers()
                .get(name)
                .map(|value| request.headers_mut().append(name, value.clone()));
        }
        Ok(request)
    };
    let id = judge.id();
    let request = pair(&id, [&forger, &forger])?;
    let mut told = refused(judge, "an event with two forged signatures", &id, &request).await?;
    for (order, signers) in
        [("valid, forged", [signer, &forger]), ("forged, valid", [&forger, signer])]
    {
        let id = judge.id();
        let answer = judge.send(&pair(&id, signers)?).await;
        judge.handled(&id, judge.settles()).await?;
        told = format!("{told}; {order}: {answer}");
    }
    judge.with_effects(told)
}
