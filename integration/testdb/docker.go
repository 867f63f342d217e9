package testdb

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/ory/dockertest/v3"
	"github.com/ory/dockertest/v3/docker"
)

const (
	pingTimeout = 5 * time.Second
	pullTimeout = 3 * time.Minute
	port        = "5432/tcp"
)

// errNoImage: unlike a machine without Docker, one without the image may be a
// mistake worth a word.
var errNoImage = fmt.Errorf("image %w", errAbsent)

// inDocker starts a container of image. Its error is errAbsent if there is no
// Docker, or errNoImage, which is errAbsent too.
func inDocker(ctx context.Context, image string) (*server, error) {
	pool, err := dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("docker: %w: %w", errAbsent, err)
	}
	if err := pull(ctx, pool, image); err != nil {
		return nil, fmt.Errorf("docker image %s: %w: %w", image, errNoImage, err)
	}
	password := rand.Text()
	box, err := run(pool, image, password)
	if err != nil {
		return nil, fmt.Errorf("testdb: docker run %s: %w", image, err)
	}
	srv := &server{
		admin:  adminURL(box.GetHostPort(port), password),
		source: "docker " + image,
		stop:   func() error { return purge(pool, box) },
	}
	follow(pool, box, srv)
	if _, err := srv.ready(ctx, startTimeout); err != nil {
		return nil, errors.Join(fmt.Errorf("testdb: docker %s: %w", image, err), srv.stop())
	}
	return srv, nil
}

// dial returns a client of an engine that answers.
func dial(ctx context.Context) (*dockertest.Pool, error) {
	pool, err := dockertest.NewPool("")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	return pool, pool.Client.PingWithContext(ctx)
}

// pull fetches image unless it is there.
func pull(ctx context.Context, pool *dockertest.Pool, image string) error {
	if _, err := pool.Client.InspectImage(image); err == nil {
		return nil
	}
	repository, tag := splitImage(image)
	ctx, cancel := context.WithTimeout(ctx, pullTimeout)
	defer cancel()
	return pool.Client.PullImage(docker.PullImageOptions{
		Context:    ctx,
		Repository: repository,
		Tag:        tag,
	}, docker.AuthConfiguration{})
}

func splitImage(image string) (repository, tag string) {
	repository, tag = docker.ParseRepositoryTag(image)
	if tag == "" {
		tag = "latest"
	}
	return repository, tag
}

// run starts the container, and has the engine remove it if we don't.
func run(pool *dockertest.Pool, image, password string) (*dockertest.Resource, error) {
	name := "coord-test-" + strings.ToLower(rand.Text())
	repository, tag := splitImage(image)
	box, err := pool.RunWithOptions(&dockertest.RunOptions{
		Name:       name,
		Repository: repository,
		Tag:        tag,
		Env:        []string{"POSTGRES_PASSWORD=" + password, "POSTGRES_INITDB_ARGS=--no-sync"},
		Cmd:        command(),
		// Loopback only: dockertest would publish it on every interface.
		PortBindings: map[docker.Port][]docker.PortBinding{port: {{HostIP: "127.0.0.1"}}},
	}, func(host *docker.HostConfig) {
		host.AutoRemove = true
		host.ShmSize = 256 << 20 // Parallel queries find Docker's 64 MB too small.
	})
	if err != nil {
		// A container that was created but not started is still there.
		return nil, errors.Join(err, pool.RemoveContainerByName(name))
	}
	// The engine counts: it goes on doing so if this process is killed.
	return box, box.Expire(expiry(testTimeout()))
}

// command is the server's, with the settings as arguments.
func command() []string {
	cmd := []string{"postgres"}
	for _, s := range settings {
		cmd = append(cmd, "-c", s)
	}
	return cmd
}

// follow makes the container's log and its end known to srv.
func follow(pool *dockertest.Pool, box *dockertest.Resource, srv *server) {
	exited, log := make(chan struct{}), new(tail)
	srv.exited, srv.log = exited, log
	go func() {
		defer close(exited)
		err := pool.Client.Logs(docker.LogsOptions{
			Container:    box.Container.ID,
			OutputStream: log,
			ErrorStream:  log,
			Stdout:       true,
			Stderr:       true,
			Follow:       true,
		})
		if err != nil {
			fmt.Fprintf(log, "(log cut off: %v)", err)
		}
	}()
}

// purge removes the container. The engine may have begun to: the server ended by
// itself, or expired.
func purge(pool *dockertest.Pool, box *dockertest.Resource) error {
	err := pool.Purge(box)
	var gone *docker.NoSuchContainer
	var refused *docker.Error
	switch {
	case err == nil, errors.As(err, &gone):
		return nil
	case errors.As(err, &refused) && refused.Status == http.StatusConflict:
		return nil
	}
	return fmt.Errorf("testdb: remove container %s: %w", box.Container.Name, err)
}

// testTimeout is go test's -timeout, 0 for none.
func testTimeout() time.Duration {
	f := flag.Lookup("test.timeout")
	if f == nil {
		return 0
	}
	d, _ := f.Value.(flag.Getter).Get().(time.Duration)
	return d
}

// expiry is how long the container may live, in seconds: longer than any run of
// the tests, since what expires under a running test looks like a bug in coord.
func expiry(timeout time.Duration) uint {
	if timeout <= 0 {
		return uint((2 * time.Hour).Seconds())
	}
	return uint(max(15*time.Minute, timeout+time.Minute).Seconds())
}
