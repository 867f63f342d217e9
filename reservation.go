package coord

// ReservationScope is a type of reservations: a tenant's namespace of an
// aggregate in a bounded context.
type ReservationScope struct{ Context, Aggregate, Tenant, Namespace string }
