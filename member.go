package coord

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"time"
)

// Member is one node of a service.
type Member struct {
	Service string
	Node    string
	Address string   // where others reach it; may be empty
	Groups  []string // what it takes part in, for others to read; sorted, without duplicates, never nil
	// ExpiresAt is the expiry by the clock that judges it, see [Config.Clock].
	ExpiresAt time.Time
}

// MemberStore keeps which nodes of a service are alive. Its methods are safe for
// concurrent use. Heartbeat runs on the connection of [LeaseStore.Renew], the others on
// the pool.
type MemberStore struct {
	c     *Coord
	table *table

	heartbeat string // (service, node, address, groups json, ttl, now) row of (expires), or none if the row is locked
	leave     string // (service, node)
	list      string // (service, now) rows of (node, address, groups json, expires)
}

func (s *MemberStore) load(c *Coord) error {
	var purge string
	ddl, ok, err := load(c.dialect, c.names, "member.sql",
		section{"heartbeat", &s.heartbeat}, section{"leave", &s.leave}, section{"list", &s.list}, section{"purge", &purge})
	s.c = c
	if ok {
		s.table, err = c.newTable(c.names, "coord_member", ddl, purge, "")
	}
	return err
}

// Heartbeat makes node a member of service for ttl from now, with this address and
// these groups in place of former ones, and returns it as it is kept. Call it every
// TTL/3 or so.
func (s *MemberStore) Heartbeat(ctx context.Context, service, node, address string,
	ttl time.Duration, groups []string) (Member, error) {
	return s.beat(ctx, s.c.renewing(ttl), service, node, address, ttl, groups)
}

// beat is Heartbeat on a connection.
func (s *MemberStore) beat(ctx context.Context, on where, service, node, address string,
	ttl time.Duration, groups []string) (Member, error) {
	if err := cmp.Or(checkMember(service, node), checkOptional("address", address), checkTTL(ttl), checkGroups(groups)); err != nil {
		return Member{}, wrap("heartbeat", err)
	}
	groups = slices.Compact(slices.Sorted(slices.Values(groups)))
	if groups == nil {
		groups = []string{}
	}
	expires, err := run(ctx, s.c, on, s.table, func(ctx context.Context, on conn) (expires int64, err error) {
		found, err := on.row(ctx, s.heartbeat, []any{service, node, address, jsonList(groups), micros(ttl), s.c.now()}, &expires)
		if err == nil && !found {
			err = errLocked
		}
		return expires, err
	})
	if err != nil {
		return Member{}, wrap("heartbeat of "+service+"/"+node, err)
	}
	return Member{service, node, address, groups, time.UnixMicro(expires)}, nil
}

// Leave ends the membership. That there is none is no error. It runs even if ctx
// has ended, for at most [Config.Timeout], and is repeated if the connection breaks.
func (s *MemberStore) Leave(ctx context.Context, service, node string) error {
	if err := checkMember(service, node); err != nil {
		return wrap("leave", err)
	}
	ctx, cancel := s.c.detach(ctx)
	defer cancel()
	_, err := run(ctx, s.c, where{}, s.table, func(ctx context.Context, on conn) (int64, error) {
		return on.exec(ctx, s.leave, service, node)
	})
	return wrap("leave of "+service+"/"+node, err)
}

// List returns the members of service that have not expired, ordered by node, byte
// by byte.
func (s *MemberStore) List(ctx context.Context, service string) ([]Member, error) {
	if err := checkText("service", service); err != nil {
		return nil, wrap("list members", err)
	}
	members, err := run(ctx, s.c, where{}, s.table, func(ctx context.Context, on conn) (members []Member, err error) {
		err = on.each(ctx, s.list, []any{service, s.c.now()}, func(row func(...any) error) error {
			m, groups, expires := Member{Service: service}, "", int64(0)
			if err := row(&m.Node, &m.Address, &groups, &expires); err != nil {
				return err
			}
			m.ExpiresAt = time.UnixMicro(expires)
			members = append(members, m)
			return json.Unmarshal([]byte(groups), &members[len(members)-1].Groups)
		})
		return members, err
	})
	return members, wrap("list members of "+service, err)
}

func checkMember(service, node string) error {
	return cmp.Or(checkText("service", service), checkText("node", node))
}

func checkGroups(groups []string) error {
	for _, group := range groups {
		if err := checkText("group", group); err != nil {
			return err
		}
	}
	return nil
}
