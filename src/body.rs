//! Bodies: the request's, collected up to a limit, and the response's, which is the handler's or
//! our own.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use http_body_util::LengthLimitError;
use pin_project_lite::pin_project;
use tokio::time::Sleep;

use crate::error::BoxError;

pin_project! {
    /// The body of a response: the inner service's, or an empty one of the layer's own.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        // None for a response of the layer's own.
        #[pin]
        inner: Option<B>,
    }
}

impl<B> ResponseBody<B> {
    pub(crate) fn inner(body: B) -> Self {
        Self { inner: Some(body) }
    }

    pub(crate) fn own() -> Self {
        Self { inner: None }
    }
}

impl<B> Default for ResponseBody<B> {
    fn default() -> Self {
        Self::own()
    }
}

impl<B: Body> Body for ResponseBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        match self.project().inner.as_pin_mut() {
            Some(body) => body.poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

/// Why a request's body was not read to its end.
#[derive(Debug)]
pub(crate) enum BodyFault {
    TooLarge,
    Broken(BoxError),
    Slow,
}

pin_project! {
    /// Collects a body into one buffer; a body that is one buffer already is not copied.
    ///
    /// Trailers are dropped.
    pub(crate) struct Collect<R> {
        #[pin]
        body: R,
        limit: usize,
        time: Duration,
        // Set once the body keeps us waiting: most are there when the request is.
        deadline: Option<Pin<Box<Sleep>>>,
        first: Bytes,
        // Everything, from the second buffer on.
        all: Option<BytesMut>,
    }
}

impl<R> Collect<R> {
    pub(crate) fn new(body: R, limit: usize, time: Duration) -> Self {
        Self { body, limit, time, deadline: None, first: Bytes::new(), all: None }
    }
}

impl<R> Collect<R>
where
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    pub(crate) fn poll(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Bytes, BodyFault>> {
        let mut this = self.project();
        let limit = *this.limit;
        // What the sender announces is refused before it is read.
        if this.body.size_hint().lower() > u64::try_from(limit).unwrap_or(u64::MAX) {
            return Poll::Ready(Err(BodyFault::TooLarge));
        }
        loop {
            let frame = match this.body.as_mut().poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(fault(error.into()))),
                Poll::Ready(None) => break,
                Poll::Pending => {
                    let time = *this.time;
                    let sleep =
                        this.deadline.get_or_insert_with(|| Box::pin(tokio::time::sleep(time)));
                    ready!(sleep.as_mut().poll(cx));
                    return Poll::Ready(Err(BodyFault::Slow));
                }
            };
            let Ok(data) = frame.into_data() else { continue };
            let so_far = this.all.as_ref().map_or(this.first.len(), BytesMut::len);
            if data.len() > limit.saturating_sub(so_far) {
                return Poll::Ready(Err(BodyFault::TooLarge));
            }
            if let Some(all) = this.all {
                all.extend_from_slice(&data);
            } else if this.first.is_empty() {
                *this.first = data;
            } else {
                let mut all = BytesMut::with_capacity(this.first.len() + data.len());
                all.extend_from_slice(this.first);
                all.extend_from_slice(&data);
                *this.all = Some(all);
            }
        }
        let first = std::mem::take(this.first);
        Poll::Ready(Ok(this.all.take().map_or(first, BytesMut::freeze)))
    }
}

/// A limit of somebody further out is still a limit.
fn fault(error: BoxError) -> BodyFault {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(&*error);
    while let Some(cause) = next {
        if cause.is::<LengthLimitError>() {
            return BodyFault::TooLarge;
        }
        next = cause.source();
    }
    BodyFault::Broken(error)
}
