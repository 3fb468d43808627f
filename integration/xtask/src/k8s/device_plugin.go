// A device plugin for the kubelet. It offers each of a number of GPUs several times, as NVIDIA's
// plugin does with time-slicing. A container that gets a device also gets the mounts and device files that a file lists. The file lists the parts of
// the simulated GPU. For a real GPU, NVIDIA's plugin and container toolkit add these parts.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

type config struct {
	Resource string
	GPUs     int
	Replicas int
	Response pluginapi.ContainerAllocateResponse
}

type plugin struct {
	pluginapi.UnimplementedDevicePluginServer
	config
}

func (p *plugin) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

func (p *plugin) ListAndWatch(_ *pluginapi.Empty, stream pluginapi.DevicePlugin_ListAndWatchServer) error {
	devices := make([]*pluginapi.Device, p.GPUs*p.Replicas)
	for i := range devices {
		id := fmt.Sprintf("gpu-%d::%d", i/p.Replicas, i%p.Replicas)
		devices[i] = &pluginapi.Device{ID: id, Health: pluginapi.Healthy}
	}
	if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: devices}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (p *plugin) Allocate(_ context.Context, request *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	answer := &pluginapi.AllocateResponse{}
	for range request.ContainerRequests {
		answer.ContainerResponses = append(answer.ContainerResponses, &p.Response)
	}
	return answer, nil
}

func main() {
	p := &plugin{}
	text, err := os.ReadFile(os.Args[1])
	if err == nil {
		err = json.Unmarshal(text, &p.config)
	}
	if err != nil {
		log.Fatal(err)
	}
	socket := filepath.Join(pluginapi.DevicePluginPath, "affinode-test.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	pluginapi.RegisterDevicePluginServer(server, p)
	go func() { log.Fatal(server.Serve(listener)) }()

	kubelet, err := grpc.NewClient("unix://"+pluginapi.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	_, err = pluginapi.NewRegistrationClient(kubelet).Register(context.Background(), &pluginapi.RegisterRequest{
		Version:      pluginapi.Version,
		Endpoint:     filepath.Base(socket),
		ResourceName: p.Resource,
	})
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("%s: %d devices", p.Resource, p.GPUs*p.Replicas)
	select {}
}
